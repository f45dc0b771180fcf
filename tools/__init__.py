"""Tools of authors, instructors and of those with a GPU machine; lessons do not need them."""
