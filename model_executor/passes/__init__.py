"""Layer passes: which rows a layer computes, attends to and keeps. Each cache method
names a layer pass.
"""
