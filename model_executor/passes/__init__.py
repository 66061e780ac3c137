"""Layer passes: what a layer computes, attends to and keeps. Each cache method names
one of them.
"""
