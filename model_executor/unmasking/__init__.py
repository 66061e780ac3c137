"""Which masked positions a step fills: statistics of the predictions, rules, and the choice."""
