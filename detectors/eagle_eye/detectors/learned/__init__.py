"""Detection by a learned model, for anomalies that no rule names."""
