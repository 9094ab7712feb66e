"""Build the site: the executed notebooks, the texts of the project and the reference, as static pages.

    python site/build.py [FOLDER]     into build/site, or into a folder of your own

Nothing is executed and nothing is downloaded, and the pages load nothing from elsewhere. A warning is an error.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as sphinx
from staging import ROOT, restore_downloads, stage


def build(site: Path) -> int:
    """Build the site into a folder, which is emptied first; returns Sphinx's exit status."""
    shutil.rmtree(site, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        stage(source)
        options = ["--builder=html", "--quiet", "--jobs=2", "--fail-on-warning", "--keep-going"]
        folders = [f"--conf-dir={ROOT / 'site'}", f"--doctree-dir={folder}/doctrees", str(source), str(site)]
        status = sphinx([*options, *folders])
    restore_downloads(site)
    return status


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    status = build(target)
    print(f"{target / 'index.html'}" if status == 0 else "the site has errors, see above")
    sys.exit(status)
