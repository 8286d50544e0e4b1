import jinja2
import pytest

from holdfast.core.page import template


def test_what_a_page_shows_is_escaped_cleaned_and_there(tmp_path):
    path = tmp_path / "page.html.j2"
    path.write_text('{% include "part.html.j2" %} {{ name }}')
    (tmp_path / "part.html.j2").write_text("{% if true %}\nHere:\n{% endif %}")
    assert template(path).render(name="<b>\x1b[31mred\x07</b>") == "Here:\n &lt;b&gt;red␇&lt;/b&gt;"
    with pytest.raises(jinja2.UndefinedError, match="'name' is undefined"):
        template(path).render()
