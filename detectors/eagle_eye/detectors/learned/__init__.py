"""What no rule names: nodes unlike those that a model was trained on."""
