"""The ranks of a generation find each other here, agree with each other, and exchange tensors."""
