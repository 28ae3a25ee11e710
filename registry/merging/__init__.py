"""Making a checkpoint of others: averages of some tensors, the rest picked."""
