//! A page of Markdown, as far as the checks need it.

/// A page with its path from the root of the repository.
pub(crate) struct Page {
    pub(crate) path: String,
    pub(crate) lines: Vec<Line>,
}

/// One line with its number.
pub(crate) struct Line {
    pub(crate) number: usize,
    pub(crate) text: String,
    pub(crate) place: Place,
}

/// Where a line stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Prose,
    /// Inside of a block of code, with what stands behind its opening fence.
    Code(String),
}

impl Page {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let mut lines = Vec::new();
        let mut place = Place::Prose;
        for (at, text) in text.lines().enumerate() {
            if let Some(language) = text.strip_prefix("```") {
                place = match place {
                    Place::Prose => Place::Code(language.to_owned()),
                    Place::Code(_) => Place::Prose,
                };
                continue;
            }
            lines.push(Line {
                number: at + 1,
                text: text.to_owned(),
                place: place.clone(),
            });
        }
        Self {
            path: path.to_owned(),
            lines,
        }
    }

    /// The lines outside of blocks of code.
    pub(crate) fn prose(&self) -> impl Iterator<Item = &Line> {
        self.lines.iter().filter(|line| line.place == Place::Prose)
    }

    /// The definitions of links: name and target.
    pub(crate) fn definitions(&self) -> impl Iterator<Item = (&Line, &str, &str)> {
        self.prose().filter_map(|line| {
            let (name, target) = line.text.strip_prefix('[')?.split_once("]: ")?;
            Some((line, name, target.trim()))
        })
    }

    /// The anchors of the headings, as repository pages and rustdoc make them.
    pub(crate) fn anchors(&self) -> Vec<String> {
        let headings = self.prose().filter(|line| line.text.starts_with('#'));
        headings.map(|line| anchor(&line.text)).collect()
    }

    /// `path:line`, for a message.
    pub(crate) fn place(&self, line: &Line) -> String {
        format!("{}:{}", self.path, line.number)
    }
}

impl Line {
    /// The pieces of code within the line.
    pub(crate) fn code_spans(&self) -> impl Iterator<Item = &str> {
        self.text.split('`').skip(1).step_by(2)
    }

    /// The line with its pieces of code blanked out, except for code that is the name of a link.
    pub(crate) fn without_code(&self) -> String {
        let pieces: Vec<&str> = self.text.split('`').collect();
        let mut text = String::new();
        for (at, piece) in pieces.iter().enumerate() {
            let is_code = at % 2 == 1;
            let is_name =
                text.ends_with('[') && pieces.get(at + 1).is_some_and(|next| next.starts_with(']'));
            match (is_code, is_name) {
                (true, true) => text += &format!("`{piece}`"),
                (true, false) => text.extend(piece.chars().map(|_| ' ')),
                (false, _) => text += piece,
            }
        }
        text
    }
}

fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim();
    // A link's text without its target.
    let mut text = String::new();
    let mut rest = heading;
    while let Some((before, target)) = rest.split_once("](") {
        text += before;
        rest = target.split_once(')').map_or("", |(_, behind)| behind);
    }
    text += rest;
    let kept = text
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c })
        .collect::<String>()
        .to_lowercase()
}

#[test]
fn anchors_are_lower_case_words_with_hyphens() {
    let page = Page::new(
        "p.md",
        "# What `OnLost` does, and [how](x.md)\n```\n# no heading\n```\n",
    );
    assert_eq!(page.anchors(), ["what-onlost-does-and-how"]);
}

#[test]
fn code_that_names_a_link_is_kept() {
    let page = Page::new("p.md", "a `[b](c)` [`D`] [`e`](f)");
    assert_eq!(page.lines[0].without_code(), "a        [`D`] [`e`](f)");
}
