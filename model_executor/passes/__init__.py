"""Layer passes of single cache methods, by the names of ``scheduler/methods/``."""
