"""Questions and answers to fine-tune on: heads of functions of the standard library, and what they do.

python examples/docstrings.py answers.jsonl
"""

import ast
import json
import sys
import sysconfig
from pathlib import Path

library = Path(sysconfig.get_path("stdlib"))
with open(sys.argv[1], "w", encoding="utf-8") as out:
    for path in sorted(library.glob("[a-f]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            told = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            if isinstance(node, ast.FunctionDef) and told:
                head = f"def {node.name}({ast.unparse(node.args)}):\n"
                out.write(json.dumps({"prompt": head, "answer": told.splitlines()[0]}) + "\n")
