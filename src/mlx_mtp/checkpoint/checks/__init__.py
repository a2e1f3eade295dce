"""The checks of a load: the memory, the type of the weights, and the passes on this device."""
