"""Files that users and programs exchange: JSON and TOML, read strictly and written in full or not at all."""
