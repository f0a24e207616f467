//! What parts get of this process's environment.

use std::env;
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use super::find;

/// How the world is reached, whom to trust there, how words and times are written.
const PASSED: [&str; 13] = [
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NIX_SSL_CERT_FILE",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "LANG",
    "LC_ALL",
    "LOCALE_ARCHIVE",
    "TZ",
];

/// Somebody else's program, with nothing that the person's environment holds for others: a build may ask Nix's daemon for any
/// variable that it has.
pub fn foreign(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("PATH", find::path());
    command.envs(PASSED.iter().filter_map(|name| Some((name, env::var_os(name)?))));
    command
}

/// What every part is told: where programs are, and that no proxy knows the way to this machine, which is reached there.
pub fn shared(places: Vec<String>) -> Vec<(&'static str, OsString)> {
    let set = ["no_proxy", "NO_PROXY"].into_iter().find_map(|name| env::var(name).ok());
    let direct: OsString = no_proxy(&set.unwrap_or_default(), &places).into();
    vec![("PATH", find::path()), ("no_proxy", direct.clone()), ("NO_PROXY", direct)]
}

fn no_proxy(set: &str, places: &[String]) -> String {
    match set {
        // All hosts, as long as it stands alone.
        "*" => set.to_owned(),
        _ => {
            let places = places.iter().map(String::as_str);
            let words = set.split(',').chain(["localhost", "127.0.0.1", "::1"]).chain(places);
            words.map(str::trim).filter(|word| !word.is_empty()).collect::<Vec<_>>().join(",")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_proxy_is_asked_for_this_machine_nor_for_what_the_person_has_named() {
        let places = ["10.0.0.7".to_owned(), "here".to_owned()];
        assert_eq!(no_proxy("", &places), "localhost,127.0.0.1,::1,10.0.0.7,here");
        assert_eq!(no_proxy(".corp, ", &places), ".corp,localhost,127.0.0.1,::1,10.0.0.7,here");
        assert_eq!(no_proxy("*", &places), "*");
    }
}
