//! Words that people give things: what may be one, in a sentence if it may not. The descriptions of the types say the same
//! as patterns.

use std::time::Duration;

use harmonia_service::api::NewEvaluation;
use harmonia_service::problem::Problem;
use harmonia_service::quantity::Span;

/// A hundred years: whoever wants longer leaves it out.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// What can be evaluated.
pub fn source(new: &NewEvaluation) -> Result<(), Problem> {
    text("source", &new.source, 4096)?;
    if let Some(branch) = &new.branch {
        text("branch", branch, 1024)?;
    }
    attrs(&new.attrs)
}

/// What is asked for of a source.
pub fn attrs(attrs: &[String]) -> Result<(), Problem> {
    if attrs.len() > 1000 {
        let sentence = format!("attrs has {} names: ask for at most 1000, or for a set of them", attrs.len());
        return Err(Problem::bad_request(sentence));
    }
    attrs.iter().try_for_each(|attr| text("an attribute", attr, 4096))
}

/// Where git clones from. Whoever may read projects reads it too, so it has no password in it.
pub fn url(url: &str) -> Result<(), Problem> {
    let rest = ["https://", "http://", "ssh://", "git://", "file://"]
        .iter()
        .find_map(|scheme| url.strip_prefix(scheme));
    let fits =
        |rest: &str| (1..=2000).contains(&rest.len()) && rest.bytes().all(|byte| byte.is_ascii_graphic());
    if !rest.is_some_and(fits) {
        let sentence = format!("{url:?} is no address of a repository: write https://…, ssh://… or git://…");
        return Err(Problem::bad_request(sentence));
    }
    let authority = rest.and_then(|rest| rest.split('/').next()).unwrap_or_default();
    if authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':')) {
        let sentence =
            "the address has a password in it: put it into a credential of the evaluators, and name that";
        return Err(Problem::bad_request(sentence));
    }
    Ok(())
}

/// The name of a branch or tag.
pub fn branch(name: &str) -> Result<(), Problem> {
    let fits = (1..=256).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    if fits && !name.starts_with('-') {
        return Ok(());
    }
    Err(Problem::bad_request(format!("{name:?} cannot be the name of a branch or tag")))
}

/// The name of a credential, which is a file's.
pub fn credential(name: &str) -> Result<(), Problem> {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let begins = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if begins && name.len() <= 253 && name.bytes().all(letter) {
        return Ok(());
    }
    let sentence =
        format!("{name:?} cannot be the name of a credential: use letters, digits, dots and dashes");
    Err(Problem::bad_request(sentence))
}

fn text(what: &str, text: &str, most: usize) -> Result<(), Problem> {
    if text.is_empty() || text.len() > most || text.chars().any(char::is_control) {
        let sentence = format!("{what} must have 1 to {most} bytes and no control characters");
        return Err(Problem::bad_request(sentence));
    }
    Ok(())
}

/// A new name, which has to be typed and to fit into an address.
pub fn name(what: &str, name: &str) -> Result<(), Problem> {
    let begins = name.starts_with(|first: char| first.is_ascii_alphanumeric());
    if begins && name.len() <= 200 && name.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
        return Ok(());
    }
    let sentence =
        format!("the name of {what} begins with a letter or digit and has at most 200 characters of ASCII");
    Err(Problem::bad_request(sentence))
}

/// A length of time, from `least` to a hundred years.
pub fn time(what: &str, text: &str, least: Duration) -> Result<Duration, Problem> {
    match text.parse::<Span>() {
        Ok(Span(time)) if (least..=LONGEST).contains(&time) => Ok(time),
        Ok(_) => {
            let sentence = format!("{what} is {text}: give {} to a hundred years", Span(least));
            Err(Problem::bad_request(sentence))
        }
        Err(error) => Err(Problem::bad_request(format!("{what} is {text:?}: {error}"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_can_be_typed_and_fit_into_an_address() {
        for good in ["main", "a", "acme/dotfiles", "my laptop", &"x".repeat(200)] {
            assert!(name("a project", good).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "/a", " a", "a\n", "é", &"x".repeat(201)] {
            assert!(name("a project", bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sources_are_neither_empty_nor_endless() {
        let new = |source: &str, branch: Option<&str>, attrs: Vec<String>| {
            let (project, source, branch) = ("p".to_owned(), source.to_owned(), branch.map(str::to_owned));
            super::source(&NewEvaluation { project, source, branch, attrs })
        };
        assert!(new("/src", Some("main"), vec!["checks".to_owned()]).is_ok());
        assert!(new("", None, Vec::new()).is_err());
        assert!(new(&"x".repeat(4097), None, Vec::new()).is_err());
        assert!(new("/src", Some(""), Vec::new()).is_err());
        assert!(new("/src", None, vec![String::new()]).is_err());
        assert!(new("/src", None, vec!["a".to_owned(); 1001]).is_err());
        assert!(new("/a\nb", None, Vec::new()).is_err());
    }

    #[test]
    fn times_are_bounded() {
        let least = Duration::from_secs(1);
        assert_eq!(time("retention", "90d", least).unwrap(), Duration::from_secs(90 * 86_400));
        for bad in ["", "0s", "soon", "-1d", "101000w", "3é"] {
            assert!(time("retention", bad, least).is_err(), "{bad}");
        }
    }
}
