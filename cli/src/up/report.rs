//! What a person reads when the farm is ready, and the file in which the other verbs find it.

use std::path::Path;

use super::account::own_name;
use super::error::UpError;
use super::layout::{Layout, make_directory};
use super::nix::Daemon;
use super::secrets;
use crate::client::local_file;

/// Lines of a person's nix.conf take the place of the defaults, so these are repeated.
const UPSTREAM_KEY: &str = "cache.nixos.org-1:6NCHdD59X431o0gWypbMrAURkbJ16ZPMQFGspcDShjY=";

/// What there is to say.
pub struct Report<'a> {
    pub url: &'a str,
    pub token: &'a Path,
    pub logs: &'a Path,
    pub public_keys: &'a str,
    pub daemon: &'a Daemon,
    /// What signs somebody in, once.
    pub once: &'a str,
    /// The cache answers without a token.
    pub open: bool,
}

impl Report<'_> {
    pub fn text(&self) -> String {
        let Self { url, public_keys, once, .. } = self;
        let (token, logs) = (self.token.display().to_string(), self.logs.display().to_string());
        let netrc = if self.open {
            ""
        } else {
            "  netrc-file = …                  # see docs/cache.md: the cache wants a token\n"
        };
        let store = match self.daemon.is_machines {
            true => format!(
                "It builds with the Nix daemon at {}. If garbage is collected there, inputs can be fetched\n\
                 again from the cache once these lines are in its nix.conf.\n",
                self.daemon.socket.display()
            ),
            false => format!("It builds in a private Nix store in {}.\n", self.daemon.root.display()),
        };
        let width = [url.len(), token.len(), logs.len()].into_iter().max().unwrap_or_default();
        format!(
            "\nharmonia-ci is ready.\n\n  \
             {url:width$}  the farm, in a browser\n  \
             {token:width$}  your token, which `harmonia-ci` finds by itself\n  \
             {logs:width$}  what each part has to say\n\n\
             To sign in there, once and within an hour:\n\n  \
             {url}/sign-in?once={once}\n\n\
             To use what it builds, add to nix.conf:\n\n  \
             substituters = {url}/cache https://cache.nixos.org\n  \
             trusted-public-keys = {public_keys} {UPSTREAM_KEY}\n\
             {netrc}\n\
             {store}\n\
             Try, in another terminal:\n\n  \
             harmonia-ci eval docs/demo --wait\n  \
             harmonia-ci status\n\n\
             Ctrl-C stops it when running builds have ended."
        )
    }
}

/// What there is to do while no role runs.
pub fn maintenance(layout: &Layout) -> String {
    let (database, signer) = (layout.secret("database-url"), layout.secret("signer.toml"));
    format!(
        "\nharmonia-ci is up for maintenance: no role runs.\n\n  \
         psql \"$(cat {})\"\n  \
         HARMONIA_CI_CONFIG={} harmonia-ci resync\n\n\
         Ctrl-C stops it.",
        database.display(),
        signer.display()
    )
}

/// Says where this farm is.
pub fn write_local(url: &str, token: &Path) -> Result<(), UpError> {
    let path = local_file().ok_or(UpError::NoHome)?;
    if let Some(directory) = path.parent() {
        make_directory(directory)?;
    }
    secrets::write(&path, &local_text(url, token))
}

/// TOML writes a text as JSON does.
fn local_text(url: &str, token: &Path) -> String {
    let text = |text: &str| serde_json::Value::from(text).to_string();
    format!("url = {}\ntoken_file = {}", text(url), text(&token.to_string_lossy()))
}

/// Why a private store is used although the machine has a daemon, and what would change that.
pub fn distrusted() -> String {
    format!(
        "The machine's Nix daemon does not trust this user, so a private store is used. With `trusted-users = root {}` in \
         /etc/nix/nix.conf and the daemon restarted, its store would be.",
        own_name()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_for_other_verbs_is_toml() {
        let text = local_text("http://127.0.0.1:7777", Path::new("/data/a \"b\"/token"));
        assert_eq!(text, "url = \"http://127.0.0.1:7777\"\ntoken_file = \"/data/a \\\"b\\\"/token\"");
    }
}
