//! What Nix and git say, made fit for people: bounded, without colours, without our own expression in it.

/// More is not kept, neither of the beginning nor of the end: old Nix says first what is wrong, new Nix last.
const HALF: usize = 8_000;

/// Words as they come.
#[derive(Debug, Clone, Default)]
pub struct Words {
    beginning: String,
    end: String,
    cut: bool,
}

impl Words {
    /// One more line.
    pub fn push(&mut self, line: &str) {
        if self.end.is_empty() && self.beginning.len() + line.len() < 2 * HALF {
            self.beginning.push_str(line);
            self.beginning.push('\n');
            return;
        }
        self.end.push_str(line);
        self.end.push('\n');
        if self.end.len() > 4 * HALF {
            self.cut = true;
            self.end = tail(&self.end, 2 * HALF).to_owned();
        }
    }

    /// All that is kept.
    pub fn text(&self) -> String {
        let between = if self.cut { "[…]\n" } else { "" };
        format!("{}{between}{}", self.beginning, self.end)
    }
}

/// An error as Nix says it: from where it says so, without places in `walk.nix`, and paths as they are in the source.
pub fn nix_error(words: &Words, hidden: &[String]) -> String {
    let text = plain(&words.text());
    let error = text.find("\nerror:").map_or(0, |at| at + 1);
    let error = if text.starts_with("error:") { 0 } else { error };
    let mut told = without_own_frames(&text[error..]);
    for prefix in hidden {
        told = told.replace(prefix, "");
    }
    bounded(told.trim_end())
}

/// A frame begins with `…` and ends before the next one, or before the error itself.
fn without_own_frames(text: &str) -> String {
    let (mut kept, mut frame, mut is_frame) = (String::new(), String::new(), false);
    for line in text.split_inclusive('\n') {
        let begins = line.trim_start().starts_with('…');
        if begins
            || is_frame
                && (line.trim_start().starts_with("error:") || line.trim_start().starts_with("(stack trace"))
        {
            keep(&mut kept, &std::mem::take(&mut frame), is_frame);
            is_frame = begins;
        }
        frame.push_str(line);
    }
    keep(&mut kept, &frame, is_frame);
    kept
}

fn keep(kept: &mut String, part: &str, is_frame: bool) {
    let own = is_frame && (part.contains("at «stdin»:") || part.contains("at (stdin):"));
    if !own {
        kept.push_str(part);
    }
}

/// Without escape sequences and other characters that are not text.
pub fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\u{1b}' if chars.next_if_eq(&'[').is_some() => {
                while chars.next().is_some_and(|char| !('@'..='~').contains(&char)) {}
            }
            char if char.is_control() && char != '\n' && char != '\t' => {}
            char => plain.push(char),
        }
    }
    plain
}

fn bounded(text: &str) -> String {
    if text.len() <= 2 * HALF {
        return text.to_owned();
    }
    let beginning = &text[..text.floor_char_boundary(HALF)];
    format!("{beginning}\n[…]\n{}", tail(text, HALF))
}

fn tail(text: &str, most: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(most))..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Words {
        let mut words = Words::default();
        text.lines().for_each(|line| words.push(line));
        words
    }

    #[test]
    fn colours_go_and_text_stays() {
        assert_eq!(plain("\u{1b}[31;1merror:\u{1b}[0m a\u{7}\n\tb"), "error: a\n\tb");
    }

    #[test]
    fn frames_of_our_own_go() {
        let said = "trace: something\nerror:\n       … while calling the 'seq' builtin\n         at «stdin»:5:47:\n            5| in\n\n       \
                    … while evaluating the attribute 'b'\n         at /w/source/default.nix:3:18:\n\n       error: no\n       at «stdin» is a name";
        let told = nix_error(&words(said), &["/w/source/".to_owned()]);
        assert_eq!(
            told,
            "error:\n       … while evaluating the attribute 'b'\n         at default.nix:3:18:\n\n       error: no\n       at «stdin» is a name"
        );
    }

    #[test]
    fn the_beginning_and_the_end_are_kept() {
        let long: String = (0..20_000).map(|n| format!("{n} some words\n")).collect();
        let told = nix_error(&words(&format!("error: first\n{long}error: last")), &[]);
        assert!(
            told.len() < 2 * HALF + 20 && told.starts_with("error: first") && told.ends_with("error: last")
        );
    }
}
