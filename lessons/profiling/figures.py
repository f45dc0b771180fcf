"""What this lesson draws."""

from course_utils.draw.lanes import step_spans as step_spans
