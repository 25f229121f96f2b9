"""The command line: thin; every command calls one public function."""
