use std::fmt::Write;

use harmonia_crds::pool::Sandbox;
use k8s_openapi::api::core::v1::ConfigMap;

use super::{Wanted, metadata};

/// The key, and the file that it becomes.
pub const NIX_CONF: &str = "nix.conf";
/// Where the daemon has the token of the cache.
pub const NETRC_FILE: &str = "/run/harmonia-ci/netrc";

pub fn build(wanted: &Wanted) -> ConfigMap {
    ConfigMap {
        metadata: metadata(wanted),
        data: Some([(NIX_CONF.to_owned(), nix_conf(wanted))].into()),
        ..ConfigMap::default()
    }
}

/// What the pool says comes last: it has none of the names above.
fn nix_conf(wanted: &Wanted) -> String {
    let nix = &wanted.nix;
    let substituters = [&wanted.cache].into_iter().chain(&nix.substituters);
    let keys = wanted.public_keys.iter().chain(&nix.trusted_public_keys);
    let words = |words: Vec<&str>| words.join(" ");
    let sandbox = match nix.sandbox {
        Sandbox::UserNamespace | Sandbox::Privileged => "true",
        Sandbox::Disabled => "false",
    };
    let ours = [
        ("build-users-group", "nixbld".to_owned()),
        ("builders", String::new()),
        ("cores", wanted.cores.to_string()),
        ("experimental-features", "nix-command flakes ca-derivations".to_owned()),
        ("max-jobs", wanted.slots.to_string()),
        // What another builder signed a second ago must not look missing.
        ("narinfo-cache-negative-ttl", "0".to_owned()),
        ("netrc-file", NETRC_FILE.to_owned()),
        ("sandbox", sandbox.to_owned()),
        // A build that cannot be kept apart fails: it must not run without walls.
        ("sandbox-fallback", "false".to_owned()),
        ("substituters", words(substituters.map(String::as_str).collect())),
        ("system-features", words(wanted.features.iter().map(String::as_str).collect())),
        ("trusted-public-keys", words(keys.map(String::as_str).collect())),
        ("trusted-users", "root harmonia".to_owned()),
    ];
    let more = nix.settings.iter().map(|(name, value)| (name.as_str(), value.clone()));
    ours.into_iter().chain(more).fold(String::new(), |mut text, (name, value)| {
        // A String takes every write.
        let _ = writeln!(text, "{}", format_args!("{name} = {value}").to_string().trim_end());
        text
    })
}
