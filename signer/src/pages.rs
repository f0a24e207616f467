//! What comes in pages, in the order of its keys, and is read as far as it is needed.

use std::collections::VecDeque;

use futures::future::BoxFuture;

use crate::SignerError;

/// A page, and where the next one begins.
pub type Page<T> = (Vec<T>, Option<String>);
type Read<'a, T> =
    Box<dyn Fn(Option<String>) -> BoxFuture<'a, Result<Page<T>, SignerError>> + Send + Sync + 'a>;

/// Pages of which only one is in memory.
pub struct Pages<'a, T> {
    read: Read<'a, T>,
    key: fn(&T) -> &str,
    page: VecDeque<T>,
    /// The last key of the page.
    last: String,
    next: Next,
}

/// Where the next page begins.
enum Next {
    From(Option<String>),
    Nowhere,
}

impl<'a, T> Pages<'a, T> {
    /// From the first on.
    pub fn new(
        key: fn(&T) -> &str,
        read: impl Fn(Option<String>) -> BoxFuture<'a, Result<Page<T>, SignerError>> + Send + Sync + 'a,
    ) -> Self {
        let (page, last) = (VecDeque::new(), String::new());
        Self { read: Box::new(read), key, page, last, next: Next::From(None) }
    }

    /// All that comes before this key and was not taken before; without one, all that is left.
    pub async fn before(&mut self, bound: Option<&str>) -> Result<Vec<T>, SignerError> {
        let mut all = Vec::new();
        loop {
            let end = self.page.partition_point(|item| bound.is_none_or(|bound| (self.key)(item) < bound));
            all.extend(self.page.drain(..end));
            if !self.page.is_empty() || !self.turn().await? {
                return Ok(all);
            }
        }
    }

    /// Whether there was another page.
    async fn turn(&mut self) -> Result<bool, SignerError> {
        let Next::From(from) = std::mem::replace(&mut self.next, Next::Nowhere) else { return Ok(false) };
        let (page, next) = (self.read)(from).await?;
        // Whoever compares two such lists would take for missing what only comes late.
        if !std::iter::once(self.last.as_str()).chain(page.iter().map(self.key)).is_sorted() {
            return Err(SignerError::Unordered);
        }
        self.last = page.last().map(|item| (self.key)(item).to_owned()).unwrap_or_default();
        (self.page, self.next) = (page.into(), next.map_or(Next::Nowhere, |next| Next::From(Some(next))));
        Ok(true)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use futures::FutureExt;

    use super::*;

    /// Two at a time.
    fn pages(items: &'static [&'static str]) -> Pages<'static, &'static str> {
        Pages::new(
            |item| item,
            |from| {
                let start: usize = from.map_or(0, |from| from.parse().unwrap());
                let page = items[start..].iter().copied().take(2).collect();
                let next = (start + 2 < items.len()).then(|| (start + 2).to_string());
                async move { Ok((page, next)) }.boxed()
            },
        )
    }

    #[tokio::test]
    async fn each_part_is_taken_once_whatever_the_pages_are() {
        let mut pages = pages(&["0a", "0b", "0c", "1a", "3a"]);
        assert_eq!(pages.before(Some("1")).await.unwrap(), ["0a", "0b", "0c"]);
        assert_eq!(pages.before(Some("2")).await.unwrap(), ["1a"]);
        assert!(pages.before(Some("3")).await.unwrap().is_empty());
        assert_eq!(pages.before(None).await.unwrap(), ["3a"]);
        assert!(pages.before(None).await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn what_comes_in_no_order_is_refused() {
        for items in [&["b", "a"][..], &["a", "c", "b"]] {
            let items: &'static [&'static str] = items.to_vec().leak();
            assert!(matches!(pages(items).before(None).await, Err(SignerError::Unordered)), "{items:?}");
        }
    }
}
