"""How Sphinx builds the course's site; ``make site`` copies this folder beside the pages and calls it."""

from importlib.metadata import version as version_of

from docutils import nodes
from latex2mathml.converter import convert

from tools import ROOT
from tools.author.site import settings

REPOSITORY, SITE = (settings(ROOT)[name] for name in ("repository", "site"))

project = "Distributed deep learning, run for real"
author, version = "The course authors", version_of("distributed-deep-learning-course")
project_copyright = "The course authors, CC BY 4.0 (text) and MIT (code)"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc, language = "index", "en"
nb_execution_mode = "off"
nb_execution_show_tb = False
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 4
myst_dmath_allow_space = False  # "$2.50 an hour, or $5" is no formula
html_math_renderer = "mathml"
autodoc_typehints, autodoc_member_order = "signature", "bysource"
add_module_names, maximum_signature_line_length = False, 70
napoleon_google_docstring, napoleon_use_ivar = False, True

html_theme, html_title, html_short_title = "sphinx_book_theme", project, "Distributed deep learning"
html_static_path = ["_static"] if tags.has("epub") else ["_static", "_states"]  # noqa: F821
html_css_files, html_js_files = ["site.css"], ["site.js"]
html_copy_source, html_show_sphinx, html_use_index, html_domain_indices = False, False, False, False
html_theme_options = {"logo": {"text": project}, "use_download_button": False, "show_toc_level": 2}
html_theme_options |= {"navbar_persistent": []}
if REPOSITORY:
    html_theme_options |= {"repository_url": REPOSITORY, "use_repository_button": True}
if SITE:
    extensions += ["sphinxext.opengraph"]
    html_baseurl = ogp_site_url = SITE.rstrip("/") + "/"
    ogp_use_first_image, ogp_social_cards = True, {"enable": False}

epub_title, epub_basename, epub_show_urls = project, "distributed-deep-learning", "no"
epub_identifier = epub_uid = SITE or "distributed-deep-learning"
suppress_warnings = ["epub.unknown_project_files", "epub.duplicated_toc_entry"]


def setup(app):
    """Formulas become MathML, which browsers and e-readers show without a script; and the map of the site."""

    def shown(display):
        def visit(translator, node):
            translator.body.append(convert(node.astext(), display=display))
            raise nodes.SkipNode
        return visit, None

    app.add_html_math_renderer("mathml", shown("inline"), shown("block"))

    def sitemap(app, error):
        if SITE and app.builder.name == "html" and not error:
            pages = [f"<url><loc>{html_baseurl}{name}.html</loc></url>" for name in sorted(app.env.found_docs)]
            text = f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">{"".join(pages)}</urlset>'
            (app.outdir / "sitemap.xml").write_text(text, encoding="utf-8")

    def once(app, page, template, context, document):
        if page == root_doc:  # its own title is the name of the site
            context["docstitle"] = ""

    app.connect("build-finished", sitemap)
    app.connect("html-page-context", once)
