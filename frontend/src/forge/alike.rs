//! What GitHub and Gitea answer alike.

use axum::http::StatusCode;
use serde::Deserialize;

use super::call::ForgeError;

/// What somebody may do in a repository.
#[derive(Deserialize)]
pub struct Permission {
    permission: String,
}

/// A repository.
#[derive(Deserialize)]
pub struct Project {
    pub default_branch: String,
}

/// What a forge does not know is none.
pub fn known<T>(answer: Result<T, ForgeError>) -> Result<Option<T>, ForgeError> {
    match answer {
        Err(ForgeError::Refused { status: StatusCode::NOT_FOUND, .. }) => Ok(None),
        answer => answer.map(Some),
    }
}

/// Whether a permission is enough to push. Whom a forge does not know may not.
pub fn may_push(answer: Result<Permission, ForgeError>) -> Result<bool, ForgeError> {
    let found = known(answer)?;
    Ok(found.is_some_and(|found| ["owner", "admin", "write"].contains(&found.permission.as_str())))
}

/// A list, page by page from the first on, and whether that is all of it: no more than `most` pages are asked for. Only an empty
/// page is the end: a forge may be told to give less on a page than it is asked for.
pub async fn list<T, F>(most: usize, page: impl Fn(usize) -> F) -> Result<(Vec<T>, bool), ForgeError>
where
    F: Future<Output = Result<Vec<T>, ForgeError>>,
{
    let mut all = Vec::new();
    for number in 1..=most {
        let found = page(number).await?;
        if found.is_empty() {
            return Ok((all, true));
        }
        all.extend(found);
    }
    Ok((all, false))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn answer(word: &str) -> Result<Permission, ForgeError> {
        Ok(Permission { permission: word.to_owned() })
    }

    #[test]
    fn who_may_only_look_or_is_not_known_may_not_push() {
        for (word, may) in
            [("owner", true), ("admin", true), ("write", true), ("read", false), ("none", false), ("", false)]
        {
            assert_eq!(may_push(answer(word)).unwrap(), may, "{word}");
        }
        let refused = |status| Err(ForgeError::Refused { status, words: String::new() });
        assert!(!may_push(refused(StatusCode::NOT_FOUND)).unwrap());
        assert!(may_push(refused(StatusCode::FORBIDDEN)).is_err());
    }

    #[tokio::test]
    async fn a_list_ends_with_an_empty_page_or_is_not_whole() {
        let page = |number: usize| async move { Ok(vec![number; [2, 1, 2, 0][number - 1]]) };
        assert_eq!(list(9, page).await.unwrap(), (vec![1, 1, 2, 3, 3], true));
        assert_eq!(list(3, page).await.unwrap(), (vec![1, 1, 2, 3, 3], false));
    }
}
