"""Many users at once: requests of all of them go through one model together."""
