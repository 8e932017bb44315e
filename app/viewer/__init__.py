"""One self-contained page: point at a patch or a word, and see where it looks. No network, small enough to mail.

`pages.py` packs attention rows into `page.html`; `scenes.py` collects them from a ViT or from answers.
"""

from regard.viewer.pages import LIMIT_MB, Group, write_viewer
from regard.viewer.scenes import view, view_answers

__all__ = ["LIMIT_MB", "Group", "view", "view_answers", "write_viewer"]
