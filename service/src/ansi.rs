//! What of a log reaches a terminal: text, line ends, tabs and colours. A build may print whatever else a terminal obeys,
//! and a log is not to move the cursor, to set a title or to type for whoever reads it.

/// The longest sequence that is waited for; a colour has no more than a few numbers.
const LONGEST: usize = 64;

/// Lets text through, piece by piece: a sequence may be cut anywhere.
#[derive(Debug, Default)]
pub struct Filter {
    colours: bool,
    state: State,
    sequence: String,
}

#[derive(Debug, Default, PartialEq)]
enum State {
    #[default]
    Text,
    /// After ESC.
    Escape,
    /// After ESC [, as long as it can be a colour.
    Control,
    /// After ESC [, when it cannot.
    Other,
    /// After ESC ] and its like, until BEL or ESC \.
    Words,
    /// After ESC within those.
    WordsEscape,
}

impl Filter {
    /// With colours or without.
    pub fn new(colours: bool) -> Self {
        Self { colours, ..Self::default() }
    }

    /// What may be shown of the next piece.
    pub fn pass(&mut self, text: &str) -> String {
        let mut shown = String::with_capacity(text.len());
        for char in text.chars() {
            self.step(char, &mut shown);
        }
        shown
    }

    fn step(&mut self, char: char, shown: &mut String) {
        self.state = match (&self.state, char) {
            (State::Text, '\u{1b}') => State::Escape,
            // The other way to begin a sequence, in one character.
            (State::Text, '\u{9b}') => self.begin(),
            (State::Text, '\n' | '\t') => {
                shown.push(char);
                State::Text
            }
            (State::Text, _) => {
                if !char.is_control() {
                    shown.push(char);
                }
                State::Text
            }
            (State::Escape, '[') => self.begin(),
            (State::Escape, ']' | 'P' | 'X' | '^' | '_') => State::Words,
            (State::Escape, '\u{1b}') => State::Escape,
            (State::Escape, _) => State::Text,
            (State::Control, 'm') => {
                if self.colours {
                    shown.push_str(&format!("\u{1b}[{}m", self.sequence));
                }
                State::Text
            }
            (State::Control, '0'..='9' | ';' | ':') if self.sequence.len() < LONGEST => {
                self.sequence.push(char);
                State::Control
            }
            (State::Control | State::Other, '\u{20}'..='\u{3f}') => State::Other,
            (State::Control | State::Other, '\u{1b}') => State::Escape,
            (State::Control | State::Other, _) => State::Text,
            (State::Words, '\u{7}' | '\u{9c}') => State::Text,
            (State::Words, '\u{1b}') => State::WordsEscape,
            (State::Words, _) => State::Words,
            (State::WordsEscape, '\\') => State::Text,
            (State::WordsEscape, _) => State::Words,
        };
    }

    fn begin(&mut self) -> State {
        self.sequence.clear();
        State::Control
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pass(text: &str) -> String {
        Filter::new(true).pass(text)
    }

    #[test]
    fn text_and_colours_pass() {
        let text = "one\n\u{1b}[1;31mred\u{1b}[0m\ttwo é\n";
        assert_eq!(pass(text), text);
        assert_eq!(Filter::new(false).pass(text), "one\nred\ttwo é\n");
    }

    #[test]
    fn whatever_moves_or_speaks_for_somebody_does_not() {
        for (text, shown) in [
            ("\u{1b}[2Jcleared", "cleared"),
            ("\u{1b}[10;10Hmoved", "moved"),
            ("\u{1b}]0;title\u{7}after", "after"),
            ("\u{1b}]8;;http://x\u{1b}\\link\u{1b}]8;;\u{1b}\\", "link"),
            ("\u{1b}Pq#0\u{1b}\\picture", "picture"),
            ("\u{1b}[?25lhidden", "hidden"),
            ("\u{1b}[>4;2modd", "odd"),
            ("\u{9b}2Jone\u{8}two\r\u{7}\u{0}", "onetwo"),
            ("\u{1b}ctoo", "too"),
        ] {
            assert_eq!(pass(text), shown, "{text:?}");
        }
    }

    #[test]
    fn a_sequence_that_never_ends_costs_no_memory() {
        let mut filter = Filter::new(true);
        filter.pass("\u{1b}[");
        for _ in 0..10_000 {
            filter.pass("1;");
        }
        assert!(filter.sequence.len() <= LONGEST);
    }

    proptest! {
        #[test]
        fn where_a_piece_is_cut_makes_no_difference(text in "(\u{1b}|\\[|\\]|[0-9;]|m|J|a|\n|\u{7}|\\\\){0,40}", at in 0..40_usize) {
            let cut = text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
            let mut filter = Filter::new(true);
            let parts = filter.pass(&text[..cut]) + &filter.pass(&text[cut..]);
            prop_assert_eq!(parts, pass(&text));
        }
    }
}
