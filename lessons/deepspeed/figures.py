"""What this lesson draws."""

from course_utils.draw.bars import loader_bars as loader_bars
