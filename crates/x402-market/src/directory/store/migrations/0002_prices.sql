-- The lowest price per output, in atomic units, that was seen on cards of the evaluator with this skill: whoever paid less bought
-- nothing from it. It never rises, so that whoever paid the price of another day is heard. An evaluator's skills are kept for as long
-- as one of its cards is.
ALTER TABLE offered ADD COLUMN price INTEGER NOT NULL DEFAULT 0;
UPDATE offered SET price = coalesce(
    (SELECT min(cards.price) FROM cards JOIN card_skills ON card_skills.card = cards.id
     WHERE cards.pay_to = offered.evaluator AND card_skills.skill = offered.skill),
    (SELECT min(cards.price) FROM cards WHERE cards.pay_to = offered.evaluator),
    0
);
