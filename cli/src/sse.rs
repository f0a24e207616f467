//! Server-sent events, as they arrive.

/// An event.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Event {
    /// Its kind; `message` if it says none.
    pub kind: String,
    /// Where to go on after it.
    pub id: Option<String>,
    /// What it says.
    pub data: String,
}

/// Collects bytes into events.
#[derive(Debug, Default)]
pub struct Reader {
    rest: Vec<u8>,
    kind: Option<String>,
    id: Option<String>,
    data: Vec<String>,
}

impl Reader {
    /// The events that end within these bytes.
    pub fn read(&mut self, bytes: &[u8]) -> Vec<Event> {
        self.rest.extend_from_slice(bytes);
        let mut events = Vec::new();
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            events.extend(self.line(line.trim_end_matches(['\n', '\r'])));
        }
        events
    }

    fn line(&mut self, line: &str) -> Option<Event> {
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            let kind = self.kind.take();
            return (!data.is_empty()).then(|| Event {
                kind: kind.unwrap_or_else(|| "message".to_owned()),
                id: self.id.clone(),
                data: data.join("\n"),
            });
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
        match field {
            "data" => self.data.push(value),
            "event" => self.kind = Some(value),
            "id" => self.id = Some(value),
            _ => {}
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = ": hello\n\nid: 7\ndata: one\ndata: two\n\nevent: end\nid:8\ndata:{}\r\n\r\n";

    fn events() -> Vec<Event> {
        let event = |kind: &str, id: &str, data: &str| Event {
            kind: kind.to_owned(),
            id: Some(id.to_owned()),
            data: data.to_owned(),
        };
        vec![event("message", "7", "one\ntwo"), event("end", "8", "{}")]
    }

    #[test]
    fn events_are_read_however_they_arrive() {
        for size in [1, 3, 1000] {
            let mut reader = Reader::default();
            let read: Vec<Event> =
                TEXT.as_bytes().chunks(size).flat_map(|chunk| reader.read(chunk)).collect();
            assert_eq!(read, events(), "{size}");
        }
    }
}
