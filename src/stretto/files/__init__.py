"""Files that people and programs exchange: JSON and TOML read strictly, files written whole."""
