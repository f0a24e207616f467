//! What a request under `/cache/` may name. Nothing else is ever asked of the bucket.

/// Digits of nix32: the alphabet without e, o, t, u.
const NIX32: &[u8] = b"0123456789abcdfghijklmnpqrsvwxyz";
/// The longest name of a store path, here without the `.drv` of a derivation.
const NAME: usize = 211;
/// `build-trace-v2/`, a derivation, an output: two names, each byte of them escaped as three, and their surroundings.
const LONGEST: usize = 2 * 3 * NAME + 100;

/// An object of the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    /// What it is.
    pub kind: Kind,
    /// Its key in the bucket.
    pub object: String,
}

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// `nix-cache-info`
    Info,
    /// `<hash>.narinfo`
    NarInfo,
    /// `<hash>.ls`
    Listing,
    /// `nar/<hash>-<NAR hash>.nar.zst`
    Nar,
    /// `log/<derivation>`
    Log,
    /// `realisations/<hash>!<output>.doi` or `build-trace-v2/<derivation>/<output>.doi`
    Realisation,
}

impl Key {
    /// Reads what follows `/cache/`, as it stands in the request. Nix does not escape the `?` that a derivation's name may
    /// have, so what looks like a query belongs to the name.
    pub fn parse(path_and_query: &str) -> Option<Self> {
        if path_and_query.len() > LONGEST {
            return None;
        }
        let object = unescaped(path_and_query)?;
        let kind = kind(&object)?;
        Some(Self { kind, object })
    }
}

fn kind(object: &str) -> Option<Kind> {
    if object == "nix-cache-info" {
        return Some(Kind::Info);
    }
    let (stem, ending) = object.rsplit_once('.')?;
    let kind = match (stem.split_once('/'), ending) {
        (None, "narinfo") if is_nix32(stem, 32) => Kind::NarInfo,
        (None, "ls") if is_nix32(stem, 32) => Kind::Listing,
        (Some(("nar", hashes)), "zst") if is_nar(hashes) => Kind::Nar,
        (Some(("log", derivation)), "drv") if is_store_name(derivation) => Kind::Log,
        (Some(("realisations", id)), "doi") if is_drv_output(id) => Kind::Realisation,
        (Some(("build-trace-v2", id)), "doi") if is_traced(id) => Kind::Realisation,
        _ => return None,
    };
    Some(kind)
}

fn is_nar(text: &str) -> bool {
    let hashes = text.strip_suffix(".nar").and_then(|hashes| hashes.split_once('-'));
    hashes.is_some_and(|(path, nar)| is_nix32(path, 32) && is_nix32(nar, 52))
}

fn is_drv_output(text: &str) -> bool {
    let parts = text.strip_prefix("sha256:").and_then(|id| id.split_once('!'));
    parts.is_some_and(|(hash, output)| {
        hash.len() == 64 && hash.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) && is_name(output)
    })
}

fn is_traced(text: &str) -> bool {
    text.split_once(".drv/").is_some_and(|(derivation, output)| is_store_name(derivation) && is_name(output))
}

/// A derivation without its `.drv`.
fn is_store_name(text: &str) -> bool {
    text.split_once('-').is_some_and(|(hash, name)| is_nix32(hash, 32) && is_name(name))
}

fn is_nix32(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| NIX32.contains(&byte))
}

/// As Nix names store paths and outputs: dots may stand anywhere, but no name is `.` or `..`, alone or before a dash.
fn is_name(text: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"+-._?=".contains(&byte);
    let first = text.split('-').next().unwrap_or_default();
    (1..=NAME).contains(&text.len()) && text.bytes().all(known) && first != "." && first != ".."
}

/// Every key is ASCII.
fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut plain = parts.next()?.to_owned();
    for part in parts {
        let digits = part.get(..2).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))?;
        let byte = u8::from_str_radix(digits, 16).ok().filter(u8::is_ascii)?;
        plain.push(char::from(byte));
        plain.push_str(&part[2..]);
    }
    Some(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "7h7qgvs4kgzsn8a6rb273saxyqh4jxlz";
    const NAR_HASH: &str = "1b0ri5lsf45dknj8bfxi1syz35kgyy6d8v1r7qmr8nxahbzp0y4a";
    const HEX: &str = "3d0f4d2b6c1a5e8f7d0f4d2b6c1a5e8f7d0f4d2b6c1a5e8f7d0f4d2b6c1a5e8f";

    #[test]
    fn the_layout_is_known() {
        for (kind, object) in [
            (Kind::Info, "nix-cache-info".to_owned()),
            (Kind::NarInfo, format!("{HASH}.narinfo")),
            (Kind::Listing, format!("{HASH}.ls")),
            (Kind::Nar, format!("nar/{HASH}-{NAR_HASH}.nar.zst")),
            (Kind::Log, format!("log/{HASH}-hello-2.12.drv")),
            (Kind::Log, format!("log/{HASH}-a+b?c=d_e..f.drv")),
            (Kind::Realisation, format!("realisations/sha256:{HEX}!out.doi")),
            (Kind::Realisation, format!("build-trace-v2/{HASH}-hello.drv/out.doi")),
        ] {
            assert_eq!(Key::parse(&object), Some(Key { kind, object: object.clone() }), "{object}");
        }
    }

    #[test]
    fn escapes_are_taken_back_once() {
        let key = Key::parse(&format!("log/{HASH}-gtk%2B%3Fx%3d1.drv"));
        assert_eq!(key.map(|key| key.object), Some(format!("log/{HASH}-gtk+?x=1.drv")));
        assert_eq!(Key::parse(&format!("log/{HASH}-gtk%252B.drv")), None);
    }

    #[test]
    fn anything_else_is_nothing() {
        let long = "x".repeat(NAME);
        for text in [
            "",
            "public-keys",
            "nix-cache-info/",
            ".narinfo",
            "..",
            "nar/../nix-cache-info",
            "%2e%2e/nix-cache-info",
            "%",
            "%4",
            "%zz",
            "%+1",
            "%ff",
            "é",
            &format!("/{HASH}.narinfo"),
            &format!("{HASH}.narinfo?"),
            &format!("{HASH}.narinfo?x=1"),
            &format!("{HASH}.narinfo%00"),
            &format!("{HASH}.narinfo%0a"),
            &format!("{}.narinfo", HASH.to_uppercase()),
            &format!("{}.narinfo", HASH.replace('7', "e")),
            &format!("{HASH}0.narinfo"),
            &format!("{NAR_HASH}.narinfo"),
            &format!("nar/{HASH}.nar.zst"),
            &format!("nar/{HASH}-{NAR_HASH}.nar"),
            &format!("nar/{HASH}-{NAR_HASH}.nar.xz"),
            &format!("nar/{HASH}-{HASH}.nar.zst"),
            &format!("nar/x/{HASH}-{NAR_HASH}.nar.zst"),
            &format!("listings/{HASH}-1.ls"),
            &format!("log/{HASH}-hello"),
            &format!("log/{HASH}-.drv"),
            &format!("log/{HASH}-.drv/x.drv"),
            &format!("log/{HASH}-..drv"),
            &format!("log/{HASH}-..-x.drv"),
            &format!("log/{HASH}-a%2Fb.drv"),
            &format!("log/{HASH}-a b.drv"),
            &format!("log/{HASH}-{long}x.drv"),
            &format!("log-attempts/{HASH}-hello.drv.1"),
            &format!("realisations/sha256:{NAR_HASH}!out.doi"),
            &format!("realisations/sha256:{HEX}!.doi"),
            &format!("realisations/sha256:{HEX}!...doi"),
            &format!("realisations/sha256:{HEX}!a/b.doi"),
            &format!("build-trace-v2/{HASH}-hello.drv/../x.doi"),
            &format!("build-trace-v2/{HASH}-hello.drv/..doi"),
            &format!("build-trace-v2/{HASH}-hello/out.doi"),
            &format!("build-trace-v2/{HASH}-hello.drv/a.drv/out.doi"),
            &"x".repeat(100_000),
        ] {
            assert_eq!(Key::parse(text), None, "{text}");
        }
    }
}
