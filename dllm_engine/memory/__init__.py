"""Memory of weights, activations and pages, and the requests that fit."""
