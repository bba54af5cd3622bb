"""The YAML files that `python -m vescale.train` composes; a package so that they are found from any directory."""
