"""What the programs have in common: how they begin, their outermost nursery, their network."""
