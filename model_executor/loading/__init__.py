"""Loading of a model's weights: from files into parameters."""
