from holdfast.core.page import inline_svg, new_figure, stand_ins

VARIABLES = ("ink", "line")


def drawn():
    colours = stand_ins(VARIABLES)
    figure = new_figure(2, 1)
    axes = figure.add_subplot()
    axes.plot([0, 1 / 3, 1], [0, 1, 0.5], color=colours["line"])
    axes.set_xlabel("0.123456 of 7.00", color=colours["ink"])
    return figure


def test_stand_ins_become_the_variables_of_the_page():
    text = inline_svg(drawn(), name="n", label="about 1.23456", variables=VARIABLES)
    assert text.startswith('<svg role="img" aria-label="about 1.23456" viewBox="')
    assert "var(--line)" in text
    assert "var(--ink)" in text
    assert "#00000" not in text.replace("#000000", "")
    assert "http" not in text


def test_coordinates_are_rounded_and_words_are_not():
    text = inline_svg(drawn(), name="n", label="l", variables=VARIABLES)
    assert "0.123456 of 7.00" in text
    path = max((part for part in text.split('"') if part.startswith("M ")), key=len)
    assert all(len(number.partition(".")[2]) <= 2 for number in path.split() if number not in "ML")


def test_two_drawings_on_a_page_share_no_id_and_equal_ones_are_equal():
    one, other = (
        inline_svg(drawn(), name=name, label="l", variables=VARIABLES) for name in ("a", "b")
    )
    assert 'id="a-' in one
    assert 'id="a-' not in other
    assert inline_svg(drawn(), name="a", label="l", variables=VARIABLES) == one
