"""Tables, timelines and pages: how a predicted or a measured step is shown. Reads results, changes none.

Importing this room teaches `Timeline.save` its file suffixes.
"""

from stretto.ir.timeline import SAVERS
from stretto.report.files import load_timeline, save_json
from stretto.report.perfetto import save_perfetto
from stretto.report.svg import draw, save_svg

SAVERS.update({".perfetto-trace": save_perfetto, ".svg": save_svg, ".json": save_json})

__all__ = ["draw", "load_timeline", "save_json", "save_perfetto", "save_svg"]
