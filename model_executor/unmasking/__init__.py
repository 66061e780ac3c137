"""Choice of the positions that a step fills: statistics of the predictions, and rules."""
