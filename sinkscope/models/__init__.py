"""Loading of models by name, the families of architectures, and the checks of their wiring."""
