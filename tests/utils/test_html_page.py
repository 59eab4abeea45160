"""The skeleton of pages: text stays text, and empty columns go."""

from __future__ import annotations

from retrofit.utils.html_page import as_html, html_page, html_table


def test_text_stays_text() -> None:
    assert as_html("<b>&\"'\n\u202e") == "&lt;b&gt;&amp;&quot;&#x27;\\n\\u202e"
    page = html_page("<i>", ["<p>part</p>"])
    assert page.count("&lt;i&gt;") == 2  # title and heading
    assert page.endswith("<p>part</p>\n</body></html>\n")


def test_table() -> None:
    table = html_table(("#", "name", "error", "note"), [("0", "a<b", "", "x"), ("1", "c", "", "")])
    assert "<th>#</th><th>name</th><th>note</th>" in table
    assert "<tr><td>0</td><td>a&lt;b</td><td>x</td></tr><tr><td>1</td><td>c</td><td></td></tr>" in table
