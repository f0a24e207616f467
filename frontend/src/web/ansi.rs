//! Lines of a log as HTML: colours become classes, whatever else a terminal would obey is left out, and all text is escaped.

use harmonia_service::ansi::Filter;
use maud::{Markup, PreEscaped, Render, html};

/// More of a line is not shown; the plain log has it.
const LONGEST: usize = 8 << 10;

/// What is shown of a line, and how many bytes of it are not. Of a page of lines that never end this is what is in memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub more: usize,
}

impl Line {
    /// Without its end, and without what a terminal would have overwritten.
    pub fn of(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let text = text.strip_suffix('\r').unwrap_or(&text);
        let text = text.rsplit('\r').next().unwrap_or(text);
        let end = text.floor_char_boundary(LONGEST);
        Self { text: text[..end].to_owned(), more: text.len() - end }
    }
}

/// Knows which colours are on, from line to line.
#[derive(Debug, Clone, Default)]
pub struct Painter {
    style: Style,
}

#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Style {
    bold: bool,
    faint: bool,
    italic: bool,
    underline: bool,
    /// One of sixteen.
    front: Option<u8>,
    back: Option<u8>,
}

impl Painter {
    /// One line. A sequence that a line leaves open swallows nothing of the next one.
    pub fn line(&mut self, line: &Line) -> Markup {
        let shown = Filter::new(true).pass(&line.text);
        let mut html = String::with_capacity(shown.len() + 32);
        let mut rest = shown.as_str();
        while let Some(at) = rest.find('\u{1b}') {
            self.piece(&rest[..at], &mut html);
            // The filter lets nothing but whole colours through.
            let Some((numbers, after)) = rest[at + 1..].trim_start_matches('[').split_once('m') else {
                break;
            };
            self.style.take(numbers);
            rest = after;
        }
        self.piece(rest, &mut html);
        if line.more > 0 {
            let more = html! { span.cut { "… " (line.more) " bytes more" } };
            html.push_str(&more.into_string());
        }
        PreEscaped(html)
    }

    fn piece(&self, text: &str, html: &mut String) {
        if text.is_empty() {
            return;
        }
        let text = text.render().into_string();
        match self.style.classes() {
            classes if classes.is_empty() => html.push_str(&text),
            classes => html.push_str(&format!("<span class=\"{classes}\">{text}</span>")),
        }
    }
}

impl Style {
    fn classes(self) -> String {
        let flags = [(self.bold, "b"), (self.faint, "d"), (self.italic, "i"), (self.underline, "u")];
        let mut classes: Vec<String> =
            flags.iter().filter(|(on, _)| *on).map(|(_, class)| (*class).to_owned()).collect();
        classes.extend(self.front.map(|colour| format!("f{colour}")));
        classes.extend(self.back.map(|colour| format!("g{colour}")));
        classes.join(" ")
    }

    fn take(&mut self, numbers: &str) {
        let mut numbers = numbers.split([';', ':']).map(|word| word.parse::<u16>().unwrap_or(0));
        while let Some(number) = numbers.next() {
            match number {
                0 => *self = Self::default(),
                1 => self.bold = true,
                2 => self.faint = true,
                3 => self.italic = true,
                4 => self.underline = true,
                22 => (self.bold, self.faint) = (false, false),
                23 => self.italic = false,
                24 => self.underline = false,
                30..=37 => self.front = Some((number - 30) as u8),
                38 => self.front = extended(&mut numbers),
                39 => self.front = None,
                40..=47 => self.back = Some((number - 40) as u8),
                48 => self.back = extended(&mut numbers),
                49 => self.back = None,
                90..=97 => self.front = Some((number - 82) as u8),
                100..=107 => self.back = Some((number - 92) as u8),
                _ => {}
            }
        }
    }
}

/// One of 256 colours or any: the first sixteen are known here, the others are as plain text.
fn extended(numbers: &mut impl Iterator<Item = u16>) -> Option<u8> {
    match numbers.next() {
        Some(5) => numbers.next().filter(|colour| *colour < 16).map(|colour| colour as u8),
        Some(2) => {
            numbers.by_ref().take(3).for_each(drop);
            None
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn line(text: &str) -> String {
        Painter::default().line(&Line::of(text.as_bytes())).into_string()
    }

    #[test]
    fn text_is_escaped_and_colours_are_classes() {
        assert_eq!(line("<script>&\"</script>"), "&lt;script&gt;&amp;&quot;&lt;/script&gt;");
        assert_eq!(line("a\u{1b}[1;31mred\u{1b}[0mb"), "a<span class=\"b f1\">red</span>b");
        assert_eq!(line("\u{1b}[38;5;9mx\u{1b}[38;2;1;2;3my"), "<span class=\"f9\">x</span>y");
    }

    #[test]
    fn a_colour_lasts_until_it_is_taken_back() {
        let mut painter = Painter::default();
        painter.line(&Line::of("\u{1b}[32mone".as_bytes()));
        assert_eq!(
            painter.line(&Line::of("two\u{1b}[39m".as_bytes())).into_string(),
            "<span class=\"f2\">two</span>"
        );
        assert_eq!(painter.line(&Line::of("three".as_bytes())).into_string(), "three");
    }

    #[test]
    fn nothing_is_hidden_from_the_next_line() {
        let mut painter = Painter::default();
        painter.line(&Line::of("\u{1b}]0;a title that never ends".as_bytes()));
        assert_eq!(painter.line(&Line::of("seen".as_bytes())).into_string(), "seen");
    }

    #[test]
    fn what_a_terminal_would_overwrite_is_left_out() {
        assert_eq!(line("10%\r50%\r100%\r"), "100%");
        assert_eq!(line("dos\r"), "dos");
    }

    #[test]
    fn a_line_that_does_not_end_is_cut() {
        let shown = line(&"é".repeat(100_000));
        assert!(shown.len() < LONGEST + 100 && shown.ends_with("bytes more</span>"), "{}", shown.len());
    }

    proptest! {
        #[test]
        fn only_our_own_tags_come_out(text in ".{0,200}|(\u{1b}\\[|[0-9;]|m|<|>|\"|&|a|\r){0,60}") {
            let shown = line(&text);
            let bare = shown.replace("</span>", "");
            let tags = bare.split('<').skip(1).all(|tag| tag.starts_with("span class=\""));
            prop_assert!(tags && !bare.contains('\u{1b}'), "{}", shown);
        }
    }
}
