"""The part of the hook inside the training process: times steps, sends state, never blocks."""
