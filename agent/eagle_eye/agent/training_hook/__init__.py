"""What runs within the training process: steps timed, state sent, never waiting."""
