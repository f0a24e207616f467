//! Colours, on terminals that want them.

use std::io::IsTerminal;

/// Whether standard output shows colours: a terminal, and nobody set NO_COLOR.
pub fn is_wanted() -> bool {
    std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A state's word, coloured by what it means for whoever waits.
pub fn state(word: &str, wanted: bool) -> String {
    let colour = match word {
        "succeeded" | "cached" | "active" => 32,
        "failed" | "dep_failed" | "cancelled" | "gone" => 31,
        "building" | "uploading" | "publishing" | "evaluating" | "draining" => 33,
        _ => 0,
    };
    match wanted && colour > 0 {
        true => format!("\u{1b}[{colour}m{word}\u{1b}[0m"),
        false => word.to_owned(),
    }
}

/// Somebody's own words, without what a terminal obeys.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|char| if char.is_control() && !"\n\t".contains(char) { '\u{fffd}' } else { char })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_no_colour_where_none_is_wanted() {
        assert_eq!(state("failed", false), "failed");
        assert_eq!(state("failed", true), "\u{1b}[31mfailed\u{1b}[0m");
        assert_eq!(state("ready", true), "ready");
    }

    #[test]
    fn a_name_does_not_speak_to_the_terminal() {
        assert_eq!(plain("a\u{1b}]0;x\u{7}\u{9b}b\n\té"), "a\u{fffd}]0;x\u{fffd}\u{fffd}b\n\té");
    }
}
