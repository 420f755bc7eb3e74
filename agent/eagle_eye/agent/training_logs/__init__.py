"""Training logs: which ones, what their lines say in which format, and which rank wrote them."""
