"""How the ranks of a generation find each other, agree and exchange tensors."""
