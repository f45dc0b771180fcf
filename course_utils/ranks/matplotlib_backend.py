"""The matplotlib backend of ranks (private): ``plt.show()`` sends each open figure to the notebook.

Chosen by ``MPLBACKEND=module://course_utils.ranks.matplotlib_backend``; a backend is a module with these two names.
"""

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from .display import display


class FigureManager(FigureManagerBase):
    @classmethod
    def pyplot_show(cls, *, block=None) -> None:
        for manager in Gcf.get_all_fig_managers():
            display(manager.canvas.figure)
        Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    manager_class = FigureManager
