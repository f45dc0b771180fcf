"""What this lesson draws."""

from course_utils.draw.panels import loss_curves as loss_curves
