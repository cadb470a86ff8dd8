"""What a run is asked to do: settings, their flags, presets and recipes, errors of the user."""
