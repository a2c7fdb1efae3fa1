"""Would DCP help? From the lengths of a data set to predicted times of DCP and of static schemes, and a verdict."""
