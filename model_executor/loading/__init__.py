"""Loading of a model's weights: from files into parameters, and into the layout that a CPU computes with."""
