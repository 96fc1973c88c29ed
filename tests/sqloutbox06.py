"""Where release 0.6 of sqloutbox is: beside the environment, which holds release 0.4.

subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(sqloutbox06())})
"""

from __future__ import annotations

from pathlib import Path

from tests.servers import ROOT, miss


def sqloutbox06() -> Path:
    """Return the folder to be put on PYTHONPATH, or skip the test when it is not installed."""
    folder = ROOT / ".venv" / "sqloutbox06"
    if not (folder / "sqloutbox").exists():
        miss(f"sqloutbox 0.6: {folder} is missing. Run: tools/bootstrap dev")
    return folder
