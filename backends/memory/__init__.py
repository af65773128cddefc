"""The memory that models need, that processes have, and the settings of the heap."""
