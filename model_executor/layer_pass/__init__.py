"""What the layer passes of cache methods are made of."""
