"""Import of verl's configurations: its scripts, command lines and YAML files become an experiment of megarl."""
